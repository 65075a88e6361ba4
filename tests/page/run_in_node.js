// Run a Python script in Node's Pyodide, in a folder that holds a page's files.
//   node run_in_node.js PYODIDE FILES.json SCRIPT.py GIVEN.json RESULT.json
// PYODIDE: a folder; FILES.json: texts by path. The script is called with /page, "page", /result.json and /given.json.
const fs = require("fs")
const [pyodide, files, script, given, result] = process.argv.slice(2)

async function main() {
  const python = await require(`${pyodide}/pyodide.js`).loadPyodide({ indexURL: pyodide })
  for (const [path, source] of Object.entries(JSON.parse(fs.readFileSync(files, "utf-8")))) {
    const place = `/page/${path}`
    python.FS.mkdirTree(place.slice(0, place.lastIndexOf("/")))
    python.FS.writeFile(place, source)
  }
  python.FS.writeFile("/given.json", fs.readFileSync(given))
  python.FS.writeFile("/script.py", fs.readFileSync(script))
  python.runPython(`
import runpy, sys
sys.argv = ["/script.py", "/page", "page", "/result.json", "/given.json"]
runpy.run_path("/script.py", run_name="__main__")
`)
  fs.writeFileSync(result, python.FS.readFile("/result.json"))
}

main().catch(error => { console.error(error); process.exit(1) })
