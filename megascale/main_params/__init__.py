"""The fp32 main params, replicated or sharded, kept in step with the model params."""
