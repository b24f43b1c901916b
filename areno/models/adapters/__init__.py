"""LoRA adapters of a model, and the folders of peft that hold them."""
