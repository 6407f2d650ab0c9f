/// <reference types="vitest/config" />
import { defineConfig } from "vite";

// `npm run dev` against a running server: PENSTOCK_DEV_SERVER=http://127.0.0.1:8470 npm run dev
const server = process.env.PENSTOCK_DEV_SERVER ?? "http://127.0.0.1:8470";

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    target: "es2022",
    outDir: "dist",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  server: { proxy: { "/api": { target: server, ws: true, changeOrigin: true } } },
  test: { include: ["tests/**/*.test.ts"], environment: "node", testTimeout: 30_000 },
});
