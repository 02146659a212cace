"""Configs: functions that return an `experiments.config.Config`."""
