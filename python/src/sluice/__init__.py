"""The trainers' side of Sluice."""
