"""The live display of a run in a terminal: its data (board), its layout (view) and its drawing (screen)."""
