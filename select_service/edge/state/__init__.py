"""What outlives the process: the state directory, the journal, the recording, a warm start."""
