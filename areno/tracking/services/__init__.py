"""Services that follow a run: Weights & Biases, Trackio, SwanLab, MLflow. A file for each; tracker.py drives them."""
