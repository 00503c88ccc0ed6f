"""The baseline: diffusers' own pipeline behind OpenAI's image API, with static batching.

``giornata bench serve --url ... --against ...`` measures it beside Giornata. One pipeline computes one batch after the
other. A batch is of rows that are alike in size, steps, guidance and strength; it begins when it is full, or when its
first row has waited for the window. Who comes meanwhile waits for the next. Pictures are prepared and finished by the
pipeline itself, as in diffusers' guide to servers.

Read in this order: `server` (what a request says, which rows are the next batch, the queue, the HTTP server around it
and the program), `pipeline` (the pipeline, called with a batch).
"""
