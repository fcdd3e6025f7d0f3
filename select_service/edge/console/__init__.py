"""The console at /console: a page that shows the fleet live, and the data behind it.

`console_app.py` and `history.py` are loaded with the server; the rest when the page is opened;
nothing is computed while it is not.
"""
