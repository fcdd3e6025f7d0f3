"""The pure core of the service: every decision, no clock, no socket, no log.

Its callers say what time it is: `now` is always in monotonic seconds, on one clock per process.
`rows` and `slots` are numbers of ranks in a partition (`columns.py`).
"""
