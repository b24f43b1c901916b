"""Other APIs for the same samples: requests become chat completions, and answers are written as each API has them."""
