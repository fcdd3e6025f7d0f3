"""How far a rank's index is believed, by what its engine found and how fresh its events are."""
