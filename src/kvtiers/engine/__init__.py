"""The engine: real models from transformers over paged KV, behind one thread.

    port, messages, config     what a server sees; no torch
    engine, loop, answers      submitting, stepping, telling clients; detokenizer, handle
    parts                      the wiring of cache, ledger, controller, scheduler, executor
    executor, sampling         a batch in, tokens or failures out; capture keeps logits
    packing, attention,        one packed forward pass over pages
      paged_cache, pools, layout
    models, gguf_convert,      from a name to weights, identity and text
      served_model, fingerprint, codec
    reference                  the same model without any cache, and the rules of exactness

Nothing below this package imports torch.
"""
