// The stock `openai` package for JavaScript, unmodified, on the default model.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";
import { ResponsesWS } from "openai/resources/responses/ws";

const model = process.env.DIPTYCH_MODEL;
const client = new OpenAI({ baseURL: process.env.DIPTYCH_URL, apiKey: "none", maxRetries: 0 });

const messages = [
  { role: "system", content: "You are a helpful assistant." },
  { role: "user", content: "What is the capital of France?" },
];
const ANSWER = "The capital of France is Paris.";
const STORY = {
  model,
  input: "Write a long story about a lighthouse keeper.",
  temperature: 0,
  max_output_tokens: 30,
};

test("a chat, whole", async () => {
  const { data, request_id } = await client.chat.completions
    .create({ model, messages, temperature: 0 })
    .withResponse();
  assert.equal(data.choices[0].message.content, ANSWER);
  assert.equal(data.choices[0].finish_reason, "stop");
  assert.ok(request_id);
});

test("a chat, streamed, with its usage", async () => {
  const stream = await client.chat.completions.create({
    model,
    messages,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  const said = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(said, ANSWER);
  assert.deepEqual(chunks.at(-1).choices, []);
  assert.equal(chunks.at(-1).usage.completion_tokens, 7);
});

test("the helper that collects a chat", async () => {
  const stream = client.chat.completions.stream({ model, messages, temperature: 0 });
  let said = "";
  stream.on("content", (delta) => (said += delta));
  const whole = await stream.finalChatCompletion();
  assert.equal(whole.choices[0].message.content, ANSWER);
  assert.equal(said, ANSWER);
});

test("a client that leaves a stream is forgotten", async () => {
  const stream = await client.chat.completions.create({
    model,
    messages,
    stream: true,
    max_tokens: 1000,
    ignore_eos: true,
  });
  let seen = 0;
  for await (const _ of stream) if (++seen === 5) break;
  const whole = await client.chat.completions.create({ model, messages, temperature: 0 });
  assert.equal(whole.choices[0].message.content, ANSWER);
});

test("models", async () => {
  const ids = [];
  for await (const each of client.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [model]);
});

test("errors have their classes", async () => {
  await assert.rejects(
    client.chat.completions.create({ model: "nobody", messages }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  await assert.rejects(
    client.chat.completions.create({ model, messages, temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
  await assert.rejects(
    client.responses.retrieve("resp_nobody"),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "response_not_found",
  );
});

test("responses: whole, streamed, retrieved from the middle, deleted", async () => {
  const whole = await client.responses.create(STORY);
  assert.equal(whole.status, "incomplete");
  const events = [];
  for await (const event of await client.responses.create({ ...STORY, stream: true }))
    events.push(event);
  assert.deepEqual(
    events.map((event) => event.sequence_number),
    events.map((_, number) => number),
  );
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), whole.output_text);
  const { id } = events.at(-1).response;
  const later = await client.responses.retrieve(id, { stream: true, starting_after: 20 });
  const numbers = [];
  for await (const event of later) numbers.push(event.sequence_number);
  assert.deepEqual(numbers, events.slice(21).map((event) => event.sequence_number));
  const found = await client.responses.retrieve(id);
  assert.equal(found.output_text, whole.output_text);
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});

test("responses: cancelled in the middle of a stream", async () => {
  const stream = await client.responses.create({
    ...STORY,
    max_output_tokens: 1500,
    ignore_eos: true,
    stream: true,
  });
  let id, last, cancelled;
  for await (const event of stream) {
    last = event;
    if (event.type === "response.created") id = event.response.id;
    if (event.sequence_number === 10) cancelled = await client.responses.cancel(id);
  }
  assert.equal(cancelled.status, "cancelled");
  assert.equal(last.response.status, "cancelled");
});

test("responses: over a WebSocket, turn after turn", async () => {
  const expected = (await client.responses.create(STORY)).output_text;
  const socket = new ResponsesWS(client);
  try {
    let previous_response_id;
    let turn = 0;
    let said = "";
    socket.send({ type: "response.create", ...STORY });
    for await (const { type, message, error } of socket.stream()) {
      if (type === "error") throw error;
      if (type !== "message") continue;
      if (message.type === "response.output_text.delta") said += message.delta;
      if (message.type !== "response.incomplete") continue;
      previous_response_id = message.response.id;
      if (++turn === 2) break;
      assert.equal(said, expected);
      said = "";
      socket.send({ type: "response.create", ...STORY, input: "Go on.", previous_response_id });
    }
    assert.equal(turn, 2);
    assert.ok(said);
  } finally {
    socket.close();
  }
});

test("responses: errors over a WebSocket, which stays open", async () => {
  const socket = new ResponsesWS(client);
  const answers = [];
  try {
    socket.send({ type: "response.create", model: "nobody", input: "Hello" });
    for await (const { type, message, error } of socket.stream()) {
      if (type === "error") {
        answers.push(error.message);
        socket.send({ type: "response.create", ...STORY });
      } else if (type === "message" && message.type === "response.created") {
        answers.push(message.type);
        break;
      }
    }
  } finally {
    socket.close();
  }
  assert.match(answers[0], /nobody/);
  assert.equal(answers[1], "response.created");
});
