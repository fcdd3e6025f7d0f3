"""What changes replica counts, and reads them back."""
