"""What models cost: FLOPs, time and memory. Finds settings that need less memory. Imports no torch and no numpy."""
