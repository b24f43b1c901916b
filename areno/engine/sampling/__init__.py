"""What is sampled from the logits: the settings of each sequence, edits of the logits, grammars."""
