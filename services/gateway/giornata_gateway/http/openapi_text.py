"""What the OpenAPI document says in words. Pure."""

from __future__ import annotations

from typing import Final

DESCRIPTION: Final = """\
Edits pictures: the masked patch is repainted, the rest stays as it is. `POST /v1/images/edits` follows OpenAI's API, \
and its official clients work with it.

**Mask.** Without a mask, the image's own transparent pixels are the mask; an opaque image is then edited as a whole \
with `mask_mode` `auto`, and refused with the others.

**Errors** have one form, `{"error": {...}}`, with a stable `code`; 429 and 503 carry Retry-After.

**Browsers.** A gateway without API keys refuses POST and DELETE from pages of other web sites, by `Sec-Fetch-Site`.

**Jobs** belong to the tenant of the API key that submitted them; links to pictures need that key too. A synchronous \
edit is cancelled when its client leaves.

**Limits.** A tenant may have a limit of pictures a minute, which the RateLimit headers tell, and one of pictures in \
progress; more get 429 `rate_limit_exceeded` or `concurrency_limit_exceeded`, with Retry-After. A template that is \
registered counts as a picture.

**Idempotency.** `POST /v1/images/edits` and `POST /v1/jobs` take an `Idempotency-Key` of 1 to 255 printable ASCII \
characters, best a random UUID. The same key with the same edit (fields, pictures, template) is one job, to whichever \
of these paths and gateways it comes: a request that comes again, or at the same time, gets the job's answer or error, \
waits for it if need be, and counts for no limit; a stream is told again from its beginning. With another edit the \
key is refused with 422 `idempotency_key_reused`. Such an edit is not cancelled when its client leaves, so that the \
client can come again. A key is remembered for a day; the pictures expire earlier, with 410. What was refused before \
it became a job is not remembered.

**Templates.** A picture that is registered at `POST /v1/templates` is sent once; its edits name it by `template_id` \
instead of `image`, and take what was recorded of it. Templates belong to their tenant, as jobs do.

**Event streams.** Every event has the id of its place in the stream; `Last-Event-ID` replays what came after. \
Of the frames that tell the end, the last alone has an id. 204 means that nothing is left to tell. \
`image_edit.partial_image` comes where `partial_images` asks for it: its `b64_json` is a small JPEG, whatever \
`output_format` is, to be scaled up to `box`.
"""
