// Retries of the stock `openai` package, against a gateway with one place.
import assert from "node:assert/strict";
import test from "node:test";
import OpenAI from "openai";

const model = process.env.DIPTYCH_MODEL;
const options = { baseURL: process.env.DIPTYCH_URL, apiKey: "none" };
const once = new OpenAI({ ...options, maxRetries: 0 });
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
  await assert.rejects(once.chat.completions.create(one), (error) => {
    const wait_s = Number(error.headers.get("retry-after"));
    assert.ok(wait_s >= 1 && wait_s <= 120);
    return error instanceof OpenAI.RateLimitError && error.code === "rate_limit_exceeded";
  });
  const waits = [];
  const hearing = async (url, init) => {
    const answer = await fetch(url, init);
    if (answer.status === 429) {
      waits.push(Number(answer.headers.get("retry-after")));
      holder.controller.abort(); // only now: there is a place when it asks again
    }
    return answer;
  };
  const patient = new OpenAI({ ...options, maxRetries: 8, fetch: hearing });
  const began = performance.now();
  const answer = await patient.chat.completions.create(one);
  const took = performance.now() - began;
  assert.ok(waits.length >= 1);
  const obeyed = waits.filter((wait_s) => wait_s < 60);
  assert.ok(took >= obeyed.reduce((sum, wait_s) => sum + wait_s, 0) * 1000, "not sooner");
  assert.equal(answer.choices[0].finish_reason, "length");
});

test("413", async () => {
  const content = "x".repeat(9 * 1024 * 1024);
  await assert.rejects(
    once.chat.completions.create({ ...one, messages: [{ role: "user", content }] }),
    (error) => error instanceof OpenAI.APIError && error.status === 413,
  );
});
