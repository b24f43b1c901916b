"""The speed of areno on a machine, against the limits of its devices: `areno bench`. No test asserts a time."""
