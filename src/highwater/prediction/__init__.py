"""Prediction: peak memory and capacity without a GPU."""
