"""The console at /console: a page that shows the fleet live, and the data behind it.

`console_app.py` and `history.py` are loaded with the server; everything else when somebody opens
the page, and nothing is computed while nobody does.
"""
