"""The whole service with real neighbours: engines that publish events, the reference as opponent.

The light half runs with fake engines; what is marked `heavy` runs engines' own publisher code out
of their wheels (`engines.py` fetches them) or the reference service in its own virtualenv.
"""
