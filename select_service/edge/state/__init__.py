"""What outlives the process: state directory, journal, recording, index snapshot."""
