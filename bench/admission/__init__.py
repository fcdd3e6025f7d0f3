"""Every admission policy of the service under the same overload, side by side."""
