"""The fp32 main params: whole or a shard of them, and how they and the model follow each other."""
