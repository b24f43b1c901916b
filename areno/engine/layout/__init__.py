"""What models take on the devices of a layout, and which layouts fit."""
