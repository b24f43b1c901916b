"""The tests, in the rooms of what they test. Modules that several tests share are in `tests.helpers`."""
