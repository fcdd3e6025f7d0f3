"""Tests of the planner's benches."""
