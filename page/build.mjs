// Builds the pages into the package: one script, one style and one template per page, whatever the machine.
//
//   node build.mjs            into ../src/headwise/show/page
//   node build.mjs FOLDER     into another folder, as the test does that compares the two

import { copyFile, mkdir, readdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import wabt from "wabt";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(process.argv[2] ?? join(here, "../src/headwise/show/page"));
const PAGES = ["heads", "explain"];

/** Kernels in WebAssembly's text format, as bytes. */
const kernels = {
  name: "wat",
  setup(esbuild) {
    esbuild.onLoad({ filter: /\.wat$/ }, async ({ path }) => {
      const { parseWat } = await wabt();
      const module = parseWat(path, await readFile(path, "utf-8"), { simd: true });
      module.validate();
      const { buffer } = module.toBinary({});
      module.destroy();
      return { contents: buffer, loader: "binary" };
    });
  },
};

await mkdir(out, { recursive: true });
for (const name of await readdir(out)) await rm(join(out, name), { recursive: true });
for (const page of PAGES) {
  const options = {
    bundle: true,
    minify: true,
    target: "es2022",
    charset: "utf8",
    legalComments: "none",
    logLevel: "warning",
  };
  await build({
    ...options,
    entryPoints: [join(here, `src/${page}/main.ts`)],
    outfile: join(out, `${page}.js`),
    format: "iife",
    plugins: [kernels],
  });
  await build({
    ...options,
    entryPoints: [join(here, `src/${page}/${page}.css`)],
    outfile: join(out, `${page}.css`),
  });
  await copyFile(join(here, `src/${page}/${page}.html`), join(out, `${page}.html`));
}
await writeFile(
  join(out, "README.md"),
  "Built from `page/` by `make page`; a test compares. Change the sources, not these files.\n",
);
