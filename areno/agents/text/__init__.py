"""What tokens read as: the text of a completion, and the share of each token in it."""
