// npm's `eventsource` reads an answer; whoever started this kills the gateway meanwhile.
// Prints a line per event: its id and its text. KIND says what is read.
import { EventSource } from "eventsource";

const base = process.env.DIPTYCH_URL;
const model = process.env.DIPTYCH_MODEL;
const story = "Write a long story about a lighthouse keeper.";

// Its timer for a reconnection does not keep Node awake.
const awake = setInterval(() => {}, 1000);

function end(source) {
  source.close();
  clearInterval(awake);
}

function print(id, text) {
  process.stdout.write(JSON.stringify({ id, text }) + "\n");
}

// An `EventSource` gives up at any status but 200: a gateway that just starts may say 503.
async function patient(url, init) {
  for (;;) {
    const answer = await fetch(url, init);
    if (answer.status !== 503) return answer;
    await new Promise((wake) => setTimeout(wake, 500));
  }
}

function chat() {
  const body = JSON.stringify({
    model,
    messages: [{ role: "user", content: story }],
    temperature: 0,
    max_tokens: 120,
    stream: true,
  });
  const post = (url, init) => {
    const headers = {
      ...init.headers,
      "content-type": "application/json",
      "x-diptych-resume": "1",
    };
    return patient(url, { ...init, method: "POST", headers, body });
  };
  const source = new EventSource(`${base}/chat/completions`, { fetch: post });
  source.addEventListener("message", ({ data, lastEventId }) => {
    if (data === "[DONE]") return end(source);
    print(lastEventId, JSON.parse(data).choices[0]?.delta.content ?? "");
  });
  return source;
}

async function response() {
  const answer = await fetch(`${base}/responses`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({
      model,
      input: story,
      temperature: 0,
      max_output_tokens: 120,
      background: true,
    }),
  });
  const { id } = await answer.json();
  const source = new EventSource(`${base}/responses/${id}?stream=true`, { fetch: patient });
  source.addEventListener("response.output_text.delta", ({ data, lastEventId }) =>
    print(lastEventId, JSON.parse(data).delta),
  );
  source.addEventListener("response.incomplete", () => end(source));
  return source;
}

const source = await (process.env.KIND === "chat" ? chat() : response());
source.addEventListener("error", ({ code, message }) => {
  if (code !== undefined && code < 500) {
    process.stderr.write(`${code} ${message}\n`);
    process.exit(1);
  }
});
