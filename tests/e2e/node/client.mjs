// Asks a gateway by OpenAI's package for Node: node client.mjs BASE_URL KEY IMAGE MASK; prints JSON of what it was told.
import fs from "node:fs";
import OpenAI, { APIError, toFile } from "openai";

const [baseURL, apiKey, image, mask] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });

async function edit(more = {}) {
  return client.images.edit({
    image: fs.createReadStream(image),
    mask: await toFile(fs.createReadStream(mask), "mask.png"),
    prompt: "a red hat",
    num_inference_steps: 4,
    seed: 7,
    reuse: "off",
    ...more,
  });
}

async function refused(ask) {
  try {
    await ask();
  } catch (error) {
    if (error instanceof APIError) {
      return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
    }
    throw error;
  }
  return null;
}

const events = [];
for await (const event of await edit({ stream: true, partial_images: 1 })) {
  events.push({ type: event.type, b64_json: event.b64_json });
}
const stranger = new OpenAI({ baseURL, apiKey: "gio_stranger", maxRetries: 0 });
console.log(
  JSON.stringify({
    answer: await edit(),
    events,
    models: (await client.models.list()).data.map((model) => model.id),
    refused: {
      field: await refused(() => edit({ seed: -1 })),
      generation: await refused(() => client.images.generate({ prompt: "a barn" })),
      variation: await refused(() => client.images.createVariation({ image: fs.createReadStream(image) })),
      key: await refused(() => stranger.models.list()),
    },
  }),
);
