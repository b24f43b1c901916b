"""What models cost: FLOPs, time, memory, and changes of settings that lower it. Imports neither torch nor numpy."""
