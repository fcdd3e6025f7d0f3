"""The rooms of a request as they are where it is traced or recorded."""
