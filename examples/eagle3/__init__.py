"""The parts of train_eagle3.py: the target, its prompts, the draft, and how good the draft is."""
