"""Many documents through one model: what is measured of each, how work is shared, what it comes to."""
