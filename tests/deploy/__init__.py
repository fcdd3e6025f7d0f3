"""What is in deploy/ fits the service that is here."""
