// Retries of the stock `openai` package, against a gateway with one place.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const model = process.env.DIPTYCH_MODEL;
const options = { baseURL: process.env.DIPTYCH_URL, apiKey: "none" };
const once = new OpenAI({ ...options, maxRetries: 0 });
const patient = new OpenAI({ ...options, maxRetries: 8 });
const one = { model, messages: [{ role: "user", content: "Hello" }], max_tokens: 1 };

test("429: it waits as long as it is told, and succeeds", async () => {
  const holder = await once.chat.completions.create({
    ...one,
    max_tokens: 1500,
    ignore_eos: true,
    stream: true,
  });
  const reading = holder[Symbol.asyncIterator]();
  await reading.next();
  let wait_s;
  await assert.rejects(once.chat.completions.create(one), (error) => {
    wait_s = Number(error.headers.get("retry-after"));
    return error instanceof OpenAI.RateLimitError && error.code === "rate_limit_exceeded";
  });
  assert.ok(wait_s >= 1 && wait_s <= 120);
  setTimeout(() => holder.controller.abort(), 200);
  const began = performance.now();
  const answer = await patient.chat.completions.create(one);
  assert.ok(performance.now() - began >= wait_s * 1000, "not sooner");
  assert.equal(answer.choices[0].finish_reason, "length");
});

test("413", async () => {
  const content = "x".repeat(9 * 1024 * 1024);
  await assert.rejects(
    once.chat.completions.create({ ...one, messages: [{ role: "user", content }] }),
    (error) => error instanceof OpenAI.APIError && error.status === 413,
  );
});
