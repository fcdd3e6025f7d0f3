"""README's promises, held against the program."""
