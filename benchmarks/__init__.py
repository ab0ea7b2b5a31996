"""Measurements of the projection, of training steps and of their growth, with every peer beside them."""
