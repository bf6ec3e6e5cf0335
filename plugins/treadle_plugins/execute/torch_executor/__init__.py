"""Any causal language model of transformers, on packed tokens over paged KV."""
