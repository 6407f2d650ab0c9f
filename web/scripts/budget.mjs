// Compresses what the server sends, and holds it to its budgets (docs/dashboard.md); the build fails above them.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const FIRST_LIMIT = 120 * 1024;
const ALL_LIMIT = 350 * 1024;
const TEXT = /\.(js|css|html|svg)$/;
const dist = new URL("../dist/", import.meta.url);

const sizes = new Map();
for (const entry of readdirSync(dist, { recursive: true })) {
  if (!TEXT.test(entry)) continue;
  const packed = gzipSync(readFileSync(new URL(entry, dist)), { level: 9 });
  writeFileSync(new URL(`${entry}.gz`, dist), packed);
  sizes.set(entry, packed.length);
}
// What index.html names is what a first visit waits for; workers and lazy modules come later.
const index = readFileSync(new URL("index.html", dist), "utf8");
const first = [...sizes].filter(([name]) => name.endsWith(".js") && index.includes(name));
const sum = (list) => list.reduce((total, [, bytes]) => total + bytes, 0);
const check = (what, bytes, limit) => {
  console.log(`${what}: ${(bytes / 1024).toFixed(1)} kB gzipped of ${limit / 1024} kB`);
  if (bytes <= limit) return;
  console.error(`web/dist: ${what} has ${bytes} gzipped bytes; the budget is ${limit}. Remove or split a module.`);
  process.exitCode = 1;
};
if (first.length === 0) throw new Error("web/dist/index.html names no script");
check("first script", sum(first), FIRST_LIMIT);
check("everything", sum([...sizes]), ALL_LIMIT);
