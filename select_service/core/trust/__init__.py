"""How far a rank's index is trusted, from its engine's reports and the freshness of its events."""
