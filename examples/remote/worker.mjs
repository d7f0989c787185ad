// A worker in JavaScript, with Node's fetch only (docs/remote.md describes the protocol):
//
//     TIDEGATE_WORKER_KEY=... node worker.mjs http://127.0.0.1:8000 [CONCURRENCY, of each shard]
//
// Replace `agent` by your own. Here it solves the demo's word problems with a calculator.
const [gateway, concurrency = "16"] = process.argv.slice(2);
const workerKey = process.env.TIDEGATE_WORKER_KEY;
const worker = `node-${process.pid}-${Math.random().toString(16).slice(2, 8)}`;
const identity = { worker, secret: crypto.randomUUID() };
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

async function post(url, key, body) {
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body) });
  const answer = await response.json();
  if (response.ok) return answer;
  throw Object.assign(new Error(answer.error.message), { refused: response.status < 500 });
}

// Repeats a call until the gateway answers: it may be restarting.
async function call(url, key, body) {
  for (let pause = 0.2; ; pause = Math.min(2 * pause, 5)) {
    try {
      return await post(url, key, body);
    } catch (error) {
      if (error.refused) throw error;
      await sleep(pause);
    }
  }
}

async function run(attempt) {
  let ended = false;
  const heartbeats = (async () => {
    while (!ended) {
      await sleep(attempt.heartbeat_s);
      if (!ended) await call(`${gateway}/attempts/${attempt.attempt}/heartbeat`, workerKey, identity);
    }
  })();
  heartbeats.catch((error) => console.error(`the gateway ended an attempt: ${error.message}`));
  let report;
  try {
    report = { output: await agent(attempt) };
  } catch (error) {
    report = { outcome: "agent_error", error: String(error) };
  }
  ended = true;
  const finish = `${gateway}/s/${attempt.attempt}/finish`;
  await call(finish, attempt.finish_key, report).catch((error) => console.error(error.message));
}

// ---------------------------------------------------------------------------- the agent
async function agent({ task, base_url, api_key, model }) {
  const messages = [...task.messages];
  for (let turn = 0; turn < 6; turn++) {
    const tools = [{ type: "function", function: calculator }];
    const reply = await call(`${base_url}/chat/completions`, api_key, { model, messages, tools });
    const message = reply.choices[0].message;
    if (!message.tool_calls?.length) return message.content;
    messages.push(message);
    for (const { id, function: { arguments: text } } of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: id, content: calculate(text) });
    }
  }
  return null;
}

const calculator = {
  name: "calculator",
  description: "Work out an arithmetic expression, such as (12 + 3) * 4.",
  parameters: {
    type: "object",
    properties: { expression: { type: "string" } },
    required: ["expression"],
  },
};

function calculate(text) {
  try {
    const expression = String(JSON.parse(text).expression);
    if (!/^[\d\s.+\-*/()]{1,200}$/.test(expression)) throw new Error("only numbers, + - * / and parentheses");
    const value = Function(`"use strict"; return (${expression})`)();
    if (!Number.isFinite(value)) throw new Error("division by zero");
    return String(Math.round(value * 1e4) / 1e4);
  } catch (error) {
    return `error: ${error.message}`;
  }
}

// ---------------------------------------------------------------------------- attempts, for ever
for (const signal of ["SIGINT", "SIGTERM"]) {
  process.once(signal, () => post(`${gateway}/attempts/leave`, workerKey, identity).finally(() => process.exit()));
}
// Polls one shard of the gateway; the first answer tells how many there are.
async function serve(shard, shardsKnown) {
  let free = Number(concurrency);
  let wake = () => {};
  for (;;) {
    if (free === 0) await new Promise((resolve) => (wake = resolve));
    const body = { ...identity, capacity: free, wait_s: shardsKnown ? 30 : 0 };
    const { attempts, shards } = await call(`${gateway}/attempts/next?shard=${shard}`, workerKey, body);
    for (const attempt of attempts) {
      free -= 1;
      run(attempt).finally(() => {
        free += 1;
        wake();
      });
    }
    for (let other = 1; !shardsKnown && other < shards; other++) serve(other, true);
    shardsKnown = true;
  }
}
await serve(0, false);
