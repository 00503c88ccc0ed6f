// Asks a gateway for a picture from text by OpenAI's package for Node: node generate.mjs BASE_URL FIELDS; prints the answer.
import OpenAI from "openai";

const [baseURL, fields] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
console.log(JSON.stringify(await client.images.generate(JSON.parse(fields))));
