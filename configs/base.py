"""Every field of a training run, with the values of arXiv 2603.23198.

The other files set what is different in theirs. A field can be overridden on
the command line, too: --config.optimizer.learning_rate=3e-4.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
  """The published recipe, for the 0.5B model, on one device."""
  config = ConfigDict()
  config.seed = 0  # of the parameters and the order of the text
  config.steps = 10_000  # updates; × batch_size × seq_len tokens each
  config.accumulation_steps = 1  # micro-batches per update

  config.model = ConfigDict()
  config.model.vocab_size = 49_152  # must be the tokenizer's
  config.model.d_model = 2048  # width of the residual stream
  config.model.d_ff = 5632  # neurons of a feed-forward layer
  config.model.num_layers = 8  # each attention and feed-forward
  config.model.num_heads = 32  # query heads
  config.model.num_kv_heads = 32  # key and value heads, which query heads share
  config.model.head_dim = 0  # width of a head; 0 is d_model / num_heads
  config.model.activation = "relu"  # "relu" sparse, "silu" a dense baseline
  config.model.gated = True  # with an up projection
  config.model.tie_embeddings = True  # output matrix = input embedding
  config.model.rope_theta = 100_000.0  # base of the rotary positions
  config.model.norm_eps = 1e-5  # added to the mean square
  config.model.init_std = 0.02  # of every matrix
  config.model.dtype = "bfloat16"  # of the computation
  config.model.param_dtype = "float32"  # of the parameters and the moments
  # What going back computes again: "none", "matmuls" (all but products with
  # weights), "attention" (its products too), "layer" (everything)
  config.model.remat = "none"
  config.model.ffn_residuals = "kept"  # or "recomputed", from an FFN's input
  config.model.attention = "full"  # "cudnn" holds no scores; 16 bits on a GPU
  config.model.cross_entropy = "full"  # "chunked" never holds all logits
  config.model.cross_entropy_chunk = 2048  # tokens of a device with logits
  config.model.implementation = ""  # of the sparse layer; "" is the platform's
  config.model.hot_neurons = 0  # first ones of a layer, computed for all tokens
  # Active neurons of a token that "mosaic" packs; 0 is the implementation's
  config.model.ell_width = 0
  config.model.dense_rows = 0  # tokens with more that a device keeps
  config.model.dense_above = -1.0  # active share for dense products; −1: auto

  config.data = ConfigDict()
  # "python" (sources and documentation of the running interpreter), a path or
  # glob of text, "tfds:NAME", a URL such as hf://datasets/ORG/NAME/*.parquet,
  # or "tokens:DIR", which experiments.tokenize_corpus made
  config.data.corpus = "python"
  config.data.text_field = "text"  # of .jsonl, .parquet and TFDS rows
  # A tokenizer.json or its URL, such as hf://ORG/NAME/tokenizer.json; "" trains
  # one on the corpus
  config.data.tokenizer = ""
  # "array" copies the text and keeps all ids in one file; "shards" makes a file
  # of ids for each file of text, for corpora of any size
  config.data.store = "array"
  # Documents in a sequence: "joined" as published, or "separate", where tokens
  # see their own document only and positions begin anew in each
  config.data.documents = "joined"
  config.data.seq_len = 2048  # tokens of a sequence
  config.data.batch_size = 512  # sequences of an update, over all devices
  config.data.held_out_fraction = 0.001  # of documents, never trained on
  config.data.max_documents = 0  # 0 is all
  config.data.cache_dir = ""  # prepared text and tokens; "" is WORKDIR/data

  config.optimizer = ConfigDict()
  config.optimizer.learning_rate = 1e-3  # peak; cosine to 0
  config.optimizer.warmup_steps = 600  # from 0
  config.optimizer.b1 = 0.9  # decay of the first moment
  config.optimizer.b2 = 0.95  # decay of the second moment
  config.optimizer.eps = 1e-8  # added to its root
  config.optimizer.weight_decay = 0.1  # of matrices, not of norms
  config.optimizer.clip_norm = 1.0  # largest norm of a gradient

  config.l1 = ConfigDict()
  config.l1.coefficient = 1.28e-3  # λ of mean-over-layers l1; 0 trains the twin
  config.l1.start_step = 0  # λ is 0 before
  config.l1.warmup_steps = 0  # steps from 0 to the coefficient
  # Active neurons per token, over all layers, to which λ is then adjusted; 0
  # leaves it at the coefficient
  config.l1.target_active = 0.0
  config.l1.target_gain = 0.02  # λ changes by 2 ^ gain in a step at most
  config.l1.target_horizon = 100.0  # steps by which the trend is looked ahead
  config.l1.target_max_factor = 10.0  # of λ and the coefficient, up and down

  config.dead_neurons = ConfigDict()
  config.dead_neurons.window_tokens = 1_048_576  # of silence
  # Steps between re-initialisations of dead neurons' gate rows; 0 is never
  config.dead_neurons.reinitialize_every_steps = 0
  config.dead_neurons.mixing = 0.1  # share of the new row
  config.dead_neurons.std = 0.02  # of the new row

  config.mesh = ConfigDict()
  config.mesh.data = -1  # −1: the devices that the other axes leave
  config.mesh.fsdp = 1  # slices of the parameters, each gathered when used
  config.mesh.tensor = 1  # slices of neurons and heads

  # Steps between sortings of the neurons by how often they fire; 0 is never
  config.reorder_neurons_every_steps = 0
  # What a NaN or infinite loss or gradient does: "stop" the run, or "skip" that
  # update
  config.non_finite = "stop"
  config.max_skipped_in_a_row = 10  # so many stop the run after all
  # Several processes end if none of their steps, evaluations and checkpoints
  # was finished for so long: one of them hangs
  config.stall_timeout_s = 1800.0
  config.log_every_steps = 10  # between records of metrics.jsonl
  config.eval = ConfigDict()
  config.eval.every_steps = 500  # between evaluations on held-out text
  config.eval.batches = 0  # of held-out text; 0 is all
  config.checkpoint = ConfigDict()
  config.checkpoint.every_steps = 500  # each is evaluated, too
  config.checkpoint.keep = 2  # the latest ones, besides the best
  return config
