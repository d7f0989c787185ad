// An agent on npm's `openai`, as `CommandAgent(["node", "agent.mjs", ...])` runs it: chat or responses, and stream.
import { readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// The SDK is where NODE_MODULES says: an agent of one's own has it beside itself.
const require = createRequire(process.env.NODE_MODULES + "/");
const { default: OpenAI } = await import(pathToFileURL(require.resolve("openai")).href);

const [dialect, streamed] = [process.argv[2], process.argv.includes("stream")];
const { MODEL, TASK_FILE, RESULT_FILE } = process.env;
const parameters = { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] };
const llm = new OpenAI({ maxRetries: 0 }); // OPENAI_BASE_URL and OPENAI_API_KEY
const { messages } = JSON.parse(readFileSync(TASK_FILE, "utf8"));
const calls = [];

function calculate(text) {
  const { expression } = JSON.parse(text);
  calls.push(["calculator", { expression }]);
  return String(Function(`"use strict"; return (${expression})`)());
}

async function chat() {
  const tools = [{ type: "function", function: { name: "calculator", parameters } }];
  for (;;) {
    const body = { model: MODEL, messages, tools };
    const reply = streamed
      ? await llm.chat.completions.stream(body).finalChatCompletion()
      : await llm.chat.completions.create(body);
    const { message } = reply.choices[0];
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: calculate(call.function.arguments) });
    }
  }
}

async function responses() {
  const tools = [{ type: "function", name: "calculator", parameters, strict: false }];
  const input = [...messages];
  for (;;) {
    const body = { model: MODEL, input, tools };
    const response = streamed
      ? await llm.responses.stream(body).finalResponse()
      : await llm.responses.create(body);
    input.push(...response.output);
    const wanted = response.output.filter((item) => item.type === "function_call");
    if (!wanted.length) return response.output_text;
    for (const call of wanted) {
      input.push({ type: "function_call_output", call_id: call.call_id, output: calculate(call.arguments) });
    }
  }
}

const answer = await (dialect === "chat" ? chat() : responses());
writeFileSync(RESULT_FILE, JSON.stringify({ output: JSON.stringify({ answer, calls }) }));
