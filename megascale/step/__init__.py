"""One step: what every optimizer and every chain of them goes through, part by part."""
