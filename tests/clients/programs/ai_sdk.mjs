// An agent on the AI SDK (npm's `ai`): chat, compatible, responses or messages, and stream.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The packages are where NODE_MODULES says: an agent of one's own has them beside itself.
const require = createRequire(process.env.NODE_MODULES + "/");
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const { generateText, isStepCount, jsonSchema, streamText, tool } = await load("ai");

const [dialect, streamed] = [process.argv[2], process.argv.includes("stream")];
const { MODEL, TASK_FILE, RESULT_FILE, OPENAI_BASE_URL, OPENAI_API_KEY } = process.env;
const { messages } = JSON.parse(readFileSync(TASK_FILE, "utf8"));
const parameters = { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] };
const calls = [];

const access = { baseURL: OPENAI_BASE_URL, apiKey: OPENAI_API_KEY };
const models = {
  chat: async () => (await load("@ai-sdk/openai")).createOpenAI(access).chat(MODEL),
  responses: async () => (await load("@ai-sdk/openai")).createOpenAI(access).responses(MODEL),
  compatible: async () =>
    (await load("@ai-sdk/openai-compatible")).createOpenAICompatible({ name: "tidegate", ...access })(MODEL),
  messages: async () => (await load("@ai-sdk/anthropic")).createAnthropic(access)(MODEL),
};

const calculator = tool({
  description: "Works out an expression.",
  inputSchema: jsonSchema(parameters),
  execute: async ({ expression }) => {
    calls.push(["calculator", { expression }]);
    return String(Function(`"use strict"; return (${expression})`)());
  },
});

const asked = {
  model: await models[dialect](),
  messages,
  tools: { calculator },
  stopWhen: isStepCount(6),
  maxRetries: 0,
};
let pieces = 0;
async function stream() {
  const result = streamText(asked);
  for await (const _ of result.textStream) pieces += 1;
  return result.text;
}
const answer = streamed ? await stream() : (await generateText(asked)).text;
const { version } = JSON.parse(readFileSync(`${process.env.NODE_MODULES}/ai/package.json`, "utf8"));
writeFileSync(RESULT_FILE, JSON.stringify({ output: JSON.stringify({ answer, calls, pieces, version }) }));
