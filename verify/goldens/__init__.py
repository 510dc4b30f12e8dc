"""Golden fixtures: given by hand, computed by the reference, recorded on a card."""
