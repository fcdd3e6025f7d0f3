"""What reads metrics and files, and what changes replica counts."""
