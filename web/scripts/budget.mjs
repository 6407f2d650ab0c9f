// The first load may take at most 120 kB of gzipped script (docs/dashboard.md); the build fails above it.
import { readdirSync, readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const LIMIT_BYTES = 120 * 1024;
const folder = new URL("../dist/assets/", import.meta.url);
const scripts = readdirSync(folder).filter((name) => name.endsWith(".js"));
const bytes = scripts.reduce((sum, name) => sum + gzipSync(readFileSync(new URL(name, folder))).length, 0);
console.log(`script: ${(bytes / 1024).toFixed(1)} kB gzipped of ${LIMIT_BYTES / 1024} kB`);
if (bytes > LIMIT_BYTES) {
  console.error(
    `web/dist has ${bytes} gzipped bytes of script; the budget is ${LIMIT_BYTES}. Remove or split a module.`,
  );
  process.exit(1);
}
