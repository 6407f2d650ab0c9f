"""Advice: settings of a job ranked by the step time that a simulation of its recorded steps predicts. Pure."""
